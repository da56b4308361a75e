"""Definitions that every other room uses."""
