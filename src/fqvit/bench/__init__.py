"""Compare speed and memory of programs with other runtimes, in interleaved rounds of separate processes."""
