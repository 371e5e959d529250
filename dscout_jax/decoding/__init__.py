"""Plain and speculative decoding: exact by construction, whole loop on the device."""
