"""Writes models as GGUF files (`export`), with their tokenizers (`vocabulary`)."""
