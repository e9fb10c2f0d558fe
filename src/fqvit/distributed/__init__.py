"""Share one job between several processes that torchrun starts."""
