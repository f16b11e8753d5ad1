"""What any part may need, and what needs no other part."""
