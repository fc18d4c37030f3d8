"""Who gets which part of which GPU, and what moves to make room. Plain logic."""
