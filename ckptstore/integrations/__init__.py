"""Where ckptstore meets training frameworks. Each integration is a package of its own, loaded when it is asked for."""
