"""Serving models over HTTP: an OpenAI-compatible API, and a page to chat on."""
