// The hot loops of the data path on CPU, for float32 rows.  See native/__init__.py.
//
// What torch's own operators leave on the table here: dedup needs a sort, sums per row need another
// one, and bag sums cannot write into a buffer that exists already.

#include "dct.h"
#include "dedup.h"
#include "keys.h"
#include "messages.h"
#include "sums.h"

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(fusedrec, m) {
  m.def("to_bits(Tensor at, int rows, int dim) -> Tensor");
  m.def("from_bits(Tensor bits, int dim, int[] counts, int[] rooms) -> Tensor");
  m.def("select_entries(Tensor numbers, Tensor threshold, int[] counts, int[] rooms) "
        "-> (Tensor, Tensor, bool)");
  m.def("keys(Tensor ids, Tensor counts, Tensor rows, Tensor starts, Tensor shifts, "
        "ScalarType key_type) -> (Tensor, Tensor)");
  m.def("hot_table(Tensor keys, Tensor replicas) -> Tensor");
  m.def("dedup(Tensor keys, Tensor part_starts, Tensor? hot_table=None) "
        "-> (Tensor, Tensor, Tensor)");
  m.def("pack(Tensor keys, Tensor counts, Tensor part_starts, int header, "
        "Tensor(a!) messages) -> ()");
  m.def("unpack(Tensor messages, int first, int end, int header) -> Tensor");
  m.def("bag_sums(Tensor flat, Tensor? addresses, int dim, Tensor rows, Tensor? offsets, "
        "Tensor? weights, Tensor? divisor, int width, int column, Tensor(a!) out) -> ()");
  m.def("row_sums(Tensor gradient, int width, int column, Tensor rows, Tensor? offsets, "
        "Tensor? weights, Tensor? divisor, Tensor? addresses, int num_rows, int dim, "
        "float scale, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(fusedrec, CPU, m) {
  m.impl("to_bits", to_bits);
  m.impl("from_bits", from_bits);
  m.impl("select_entries", select_entries);
  m.impl("keys", keys);
  m.impl("hot_table", hot_table);
  m.impl("dedup", dedup);
  m.impl("pack", pack);
  m.impl("unpack", unpack);
  m.impl("bag_sums", bag_sums);
  m.impl("row_sums", row_sums);
}
