"""The tests: folders as in src/tileattn, helpers in tools/, what crosses everything at the top."""
