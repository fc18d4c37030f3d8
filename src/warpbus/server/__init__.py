"""Models behind HTTP, in the form of OpenAI's API. FastAPI is imported here and in `warpbus serve` alone."""

from warpbus.server.app import create_app
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Model, Models, ServiceProtocol

__all__ = ["Model", "Models", "ServerOptions", "ServiceProtocol", "create_app"]
