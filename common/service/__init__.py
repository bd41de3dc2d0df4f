"""What the prefill and the decode service share around their engines: options, engine parts, life cycle, status."""
