"""How rows and gradients travel: as they are, in fewer bits, or only their largest entries."""
