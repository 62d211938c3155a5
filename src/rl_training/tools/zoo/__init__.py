"""``rl-training zoo``: benchmarks of presets, run seed by seed, and their results."""
