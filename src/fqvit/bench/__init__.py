"""Compare the speed and memory of programs with other runtimes, one process per candidate, in interleaved rounds."""
