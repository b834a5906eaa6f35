"""The decode kernel for Hopper: a producer that keeps loads in flight, and consumers on packed query rows."""
