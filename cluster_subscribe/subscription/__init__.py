"""One stream: what it delivers, what it skips, and what ends it."""
