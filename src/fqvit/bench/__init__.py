"""The engine's speed beside other runtimes: each in a process of its own, taking turns in one run."""
