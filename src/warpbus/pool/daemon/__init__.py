"""A machine's daemon: it lets clients in, starts tenants' processes, and carries out what the broker decides."""
