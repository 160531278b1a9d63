// How the search orders what it finds: pages that explain come first, evidence and the project's own pages last.
// A word in a title of the latter counts less than one in another page's text.
const FIRST = /^docs\/(tutorial|guide|training|concepts\/)/;
const LAST =
  /^(docs\/(trust|performance|simulation|hazards|testing|README|architecture)|shmacc\/|tools\/|CONTRIBUTING|SECURITY|CHANGELOG)/;

// The numbers are Sphinx's own.
var Scorer = {
  score: ([page, , , , score]) => score * (FIRST.test(page) ? 1.5 : LAST.test(page) ? 0.25 : 1),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
