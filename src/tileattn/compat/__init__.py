"""Doors through which existing code comes in: tileattn under the names of other libraries."""
