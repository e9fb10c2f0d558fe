"""Compare the speed and memory of programs with those of other runtimes, in interleaved rounds of separate processes."""
