"""Experiments as users of Pax write them, one per feature; paxml_losses.json holds what the real Paxml computes."""
