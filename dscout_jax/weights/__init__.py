"""Weights from outside: where they come from, and how they become parameter trees.

`download` fetches and checks files, `gguf` reads them, `targets` loads a target model by name.
"""
