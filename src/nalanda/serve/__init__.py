"""Nalanda's models in serving engines."""
