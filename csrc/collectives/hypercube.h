// Exchanges in which the distance between partners doubles or halves: nodes are the corners of a cube. Where
// their number is no power of two, the nodes beyond the last corner are *folded*: node C + i hands what it has
// to corner i before the exchange and gets the result from there after it.
#pragma once

#include <bit>

#include "plan/topology.h"

namespace smddp::collectives {

class Hypercube {
 public:
  explicit Hypercube(const plan::Topology& t)
      : me_(t.myNode()),
        numNodes_(t.numNodes()),
        numCorners_(static_cast<int>(std::bit_floor(static_cast<unsigned>(t.numNodes())))) {}

  int numCorners() const { return numCorners_; }
  int dimensions() const { return std::countr_zero(static_cast<unsigned>(numCorners_)); }
  bool isFolded() const { return me_ >= numCorners_; }
  // The corner that a folded node hands to, or the node that hands to this corner; -1 if none does.
  int foldPartner() const {
    if (isFolded()) return me_ - numCorners_;
    return me_ + numCorners_ < numNodes_ ? me_ + numCorners_ : -1;
  }
  // The corner across dimension d.
  int partner(int d) const { return me_ ^ (1 << d); }
  // Whether it is me whose operand comes first when partners combine theirs, both in the same order.
  bool isLower(int d) const { return (me_ & (1 << d)) == 0; }

 private:
  int me_, numNodes_, numCorners_;
};

}  // namespace smddp::collectives
