"""The web page: type a prompt, see what made the model say that. Needs the extra `[app]`."""

from noiser.app.server import check_address, check_hosts, listen, serve

__all__ = ["check_address", "check_hosts", "listen", "serve"]
