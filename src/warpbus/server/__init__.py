"""Models behind HTTP, in the form of OpenAI's API: `app` has the routes, `options` the settings of a server.

FastAPI is imported only here and by `warpbus serve`; `options`, which the command line reads, does without it.
"""
