"""Models by name: found on the disk, downloaded from hubs and uploaded to them, by the hubs' own libraries."""

from warpbus.formats.hub.finding import Pulled, find_model, pull
from warpbus.formats.hub.names import ModelName, Source, cached_name, parse_name
from warpbus.formats.hub.needed import Progress
from warpbus.formats.hub.pushing import Pushed, model_files, push, push_name

__all__ = [
    "ModelName",
    "Progress",
    "Pulled",
    "Pushed",
    "Source",
    "cached_name",
    "find_model",
    "model_files",
    "parse_name",
    "pull",
    "push",
    "push_name",
]
