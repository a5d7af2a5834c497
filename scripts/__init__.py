"""Commands for developers: builds, checks, benchmarks."""
