"""What becomes of a plan when devices are lost, or join?"""
