"""What surrounds training: benchmarks, reports, recordings, a look at the machine."""
