"""What a plan costs, and which one to take: device models, operator costs, a simulator."""
