"""JSON schemas: checked, and rewritten in the terms that the grammar compiler enforces exactly."""
