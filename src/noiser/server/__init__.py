"""The web page and its API: `noiser serve`. Needs the extra `[app]`."""

from noiser.server.listening import check_address, leave_running_work, serve

__all__ = ["check_address", "leave_running_work", "serve"]
