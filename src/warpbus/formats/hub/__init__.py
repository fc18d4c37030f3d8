"""Models by name: found on the disk, or downloaded from Hugging Face or ModelScope by the hubs' own libraries."""

from warpbus.formats.hub.finding import Pulled, find_model, pull
from warpbus.formats.hub.names import ModelName, Source, parse_name
from warpbus.formats.hub.needed import Progress

__all__ = ["ModelName", "Progress", "Pulled", "Source", "find_model", "parse_name", "pull"]
