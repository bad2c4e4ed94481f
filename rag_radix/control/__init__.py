"""What an operator sees and does: documents by id, in a running server."""
