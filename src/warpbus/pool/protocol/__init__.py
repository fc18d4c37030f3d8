"""The protocol between the sides of a pool's connections."""
