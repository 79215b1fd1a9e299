"""What a section alone cannot say of itself: one file for each kind of mistake."""
