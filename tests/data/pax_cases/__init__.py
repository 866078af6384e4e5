"""Experiments as users of Pax write them, one per feature; paxml_losses.json has the results of Paxml."""
