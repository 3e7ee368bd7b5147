(function(){
var form=document.getElementById('tools'),rows=[].slice.call(document.querySelectorAll('.check'));
if(form){form.hidden=false;
var pick=function(name){var one=form.querySelector('[name='+name+']:checked');
return one?one.value:''};
var apply=function(){
var words=document.getElementById('search').value.toLowerCase().split(/\s+/).filter(Boolean);
var status=pick('status'),tier=pick('tier'),count=0;
rows.forEach(function(row){
var data=row.dataset,hit=(!status||data.status===status)&&(!tier||data.tier===tier)&&
words.every(function(word){return data.words.indexOf(word)>=0});
row.hidden=!hit;if(hit)count++});
document.getElementById('shown').textContent=count+' of '+rows.length+' checks'};
form.addEventListener('input',apply);
form.addEventListener('submit',function(event){event.preventDefault()})}
[].forEach.call(document.querySelectorAll('.copy'),function(button){
if(!navigator.clipboard)return;
button.hidden=false;
button.addEventListener('click',function(){
navigator.clipboard.writeText(button.parentNode.querySelector('code').textContent).then(function(){
button.textContent='Copied';setTimeout(function(){button.textContent='Copy'},1500)})})})
})();
