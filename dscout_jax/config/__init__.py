"""Static choices as frozen dataclasses, checked once when they are made."""
