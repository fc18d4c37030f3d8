"""The daemon of a machine: accepts clients, starts tenants' processes, and carries out the broker's decisions."""
