"""Data that is made: glyphs, digits, arithmetic, problems of reasoning-gym."""
