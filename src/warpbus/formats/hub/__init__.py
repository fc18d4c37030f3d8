"""Models by their names: found on the disk, or brought from Hugging Face or ModelScope.

It speaks both hubs' public protocols itself: downloads are to go on after the process was killed, each file is to be
compared with the hash that the hub lists, and only the files that Warpbus reads are to come.
"""

from warpbus.formats.hub.finding import Progress, Pulled, find_model, pull
from warpbus.formats.hub.names import ModelName, Source, parse_name

__all__ = ["ModelName", "Progress", "Pulled", "Source", "find_model", "parse_name", "pull"]
