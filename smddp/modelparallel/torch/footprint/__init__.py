"""What memory a rank needs: predicted from the model's shapes, and counted in a step."""
