"""Regular expressions: read into a tree, and written anew in the terms that the grammar compiler reads as they mean."""
