"""The operating system, which no experiment is about: files, processes, child processes, the I/O event loop."""
