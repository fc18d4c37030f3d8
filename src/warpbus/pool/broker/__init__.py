"""Decides which lease gets which part of which GPU, and which leases migrate to make room. Without sockets and
clocks."""
