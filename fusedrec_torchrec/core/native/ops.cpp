// The hot loops of the data path on CPU, for float32 rows.  See native/__init__.py.
//
// What torch's own operators leave on the table here: dedup needs a sort, sums per row need another
// one, and bag sums cannot write into a buffer that exists already.

#include "bags.h"
#include "dct.h"
#include "messages.h"
#include "row_numbers.h"
#include "sums.h"

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(fusedrec, m) {
  m.def("to_bits(Tensor at, int rows, int dim) -> Tensor");
  m.def("from_bits(Tensor bits, int dim, int[] counts, int[] rooms) -> Tensor");
  m.def("select_entries(Tensor numbers, Tensor threshold, int[] counts, int[] rooms) "
        "-> (Tensor, Tensor, bool)");
  m.def("in_range(Tensor ids, Tensor counts, Tensor rows) -> bool");
  m.def("hot_table(Tensor keys, Tensor replicas) -> Tensor");
  m.def("number_rows(Tensor ids, Tensor lengths, int[] counts, Tensor rows, Tensor starts, "
        "Tensor shifts, Tensor part_starts, Tensor? hot_table, int[] slot_ends, int batch) "
        "-> (Tensor, Tensor, Tensor[], Tensor, Tensor)");
  m.def("distinct_bags(Tensor ids, Tensor lengths, Tensor? weights, int[] bags, Tensor tables, "
        "Tensor looks, float worth) -> (Tensor, Tensor, Tensor, Tensor?, Tensor)");
  m.def("repeating_slots(Tensor ids, Tensor lengths, Tensor? weights, int[] bags, Tensor looks, "
        "float worth) -> Tensor");
  m.def("bag_units(Tensor lengths, Tensor distinct, Tensor ends, Tensor shards, int buckets, "
        "int ranks) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("bag_cells(Tensor numbers, int[] bags, int[] shards, Tensor unit_places, Tensor units, "
        "int empty, bool side_by_side) -> Tensor");
  m.def("pack_bags(Tensor rows, Tensor lengths, Tensor? weights, Tensor bags, Tensor first_rows, "
        "Tensor units, Tensor ids, int[] starts, Tensor(a!) words) -> ()");
  m.def("pack_rows(Tensor keys, Tensor counts, Tensor part_starts, int[] starts, "
        "Tensor(a!) words) -> ()");
  m.def("unpack(Tensor messages, int header, int[] sizes, int segments) -> Tensor[]");
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
  m.impl("in_range", in_range);
  m.impl("hot_table", hot_table);
  m.impl("number_rows", number_rows);
  m.impl("distinct_bags", distinct_bags);
  m.impl("repeating_slots", repeating_slots);
  m.impl("bag_units", bag_units);
  m.impl("bag_cells", bag_cells);
  m.impl("pack_bags", pack_bags);
  m.impl("pack_rows", pack_rows);
  m.impl("unpack", unpack);
  m.impl("bag_sums", bag_sums);
  m.impl("row_sums", row_sums);
}
