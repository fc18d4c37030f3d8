"""What the sides of a pool's connections say to each other, and over what."""
