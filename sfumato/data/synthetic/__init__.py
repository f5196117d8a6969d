"""Data made in code: rendered words, handwritten digits, arithmetic, dialled numbers, problems of reasoning-gym."""
