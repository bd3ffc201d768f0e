"""Commands that measure. Each prints what it ran beside what it found."""
