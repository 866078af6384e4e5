"""Bridges: run, read and write what other frameworks use. `bridges.pax` is for Paxml and Praxis."""
