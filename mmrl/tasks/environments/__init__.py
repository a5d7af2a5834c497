"""Environments that others wrote: classes with tools, servers, games; the task `environment`."""
