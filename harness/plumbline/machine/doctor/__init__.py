"""The probes of ``plumbline doctor``. They change nothing on the machine."""
